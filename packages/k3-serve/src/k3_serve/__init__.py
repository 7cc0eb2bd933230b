"""k3-serve: an OpenAI-compatible server and a terminal chat for K3 models (report 5.4)."""
