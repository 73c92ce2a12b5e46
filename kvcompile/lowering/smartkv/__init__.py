"""The attention of smartkv: over tokens of several widths, with what it gave to each of them."""
