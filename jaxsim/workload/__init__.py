"""Workloads: what arrives when, and how long it is."""

from jaxsim.workload.config import workload_from_config
from jaxsim.workload.lengths import Length
from jaxsim.workload.prefix import Prefix
from jaxsim.workload.priority import Priority
from jaxsim.workload.readers import read_trace
from jaxsim.workload.reuse import reusable_share, reusable_tokens
from jaxsim.workload.synthetic import Arrival, Workload
from jaxsim.workload.trace import TraceWorkload, drop_or_refuse

__all__ = [
    "Arrival",
    "Length",
    "Prefix",
    "Priority",
    "TraceWorkload",
    "Workload",
    "drop_or_refuse",
    "read_trace",
    "reusable_share",
    "reusable_tokens",
    "workload_from_config",
]
