"""Getting a model onto the machine and reading it: aliases, downloads, GGUF and safetensors files."""
