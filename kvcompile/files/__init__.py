"""Readers of files: JSON and safetensors whose contents are declared, so that nothing else is accepted and every refusal says where."""
