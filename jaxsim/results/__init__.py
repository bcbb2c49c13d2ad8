"""What a run leaves behind: files, tables in the terminal, and the command line to type."""
