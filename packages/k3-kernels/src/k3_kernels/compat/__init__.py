"""Other libraries' module paths, served by K3's ops."""
