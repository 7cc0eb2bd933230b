"""What surrounds the API: keys, limits, remote media, metrics, health, admin (serving 8)."""
