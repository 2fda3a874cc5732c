"""The way of a batch: producer -> staging -> transfer -> consumer."""
