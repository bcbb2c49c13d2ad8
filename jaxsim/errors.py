"""The one error of bad input."""


class ConfigError(ValueError):
    """A setting that cannot be used; its text is one line naming the key, the value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str):
        super().__init__(f"{key}={value}: {allowed}")
        self.key, self.value, self.allowed = key, value, allowed

    def __reduce__(self) -> tuple:
        return type(self), (self.key, self.value, self.allowed)  # it may come from another process
