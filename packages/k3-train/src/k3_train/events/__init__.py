"""What a run tells its plugins: `base` is the interface, a file each for those of this package."""
