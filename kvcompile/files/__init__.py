"""Readers of JSON and safetensors files with declared contents: anything else is refused, and every refusal says where."""
