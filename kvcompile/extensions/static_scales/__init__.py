"""Static scales: eight-bit codes whose scales were measured beforehand, one for each layer, half and kv head."""
