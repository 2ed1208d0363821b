"""What the activation cache serves, against what computing it again gives."""
