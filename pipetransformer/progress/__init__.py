"""What the running epoch has done: its batches, their counts, who loads them."""
