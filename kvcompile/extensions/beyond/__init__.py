"""beyond: learned levels and thresholds, shared over tokens ("Beyond: Better-than-Full-Precision KV Caches")."""
