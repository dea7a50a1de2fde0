"""A server that speaks OpenAI's protocol. In: an engine and a tokenizer. Out: an ASGI application."""
