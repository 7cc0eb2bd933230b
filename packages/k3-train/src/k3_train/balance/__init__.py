"""Load balancing of the experts: how the selection bias of each router moves (report 4.2)."""
