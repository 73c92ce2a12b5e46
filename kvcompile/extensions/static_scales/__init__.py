"""Static scales: eight-bit codes with scales measured before inference, for each layer's keys and values, per tensor or per kv head."""
