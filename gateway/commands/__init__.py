"""The ``onepass`` command's parts that are more than a call."""
