"""OpenAI's API: request bodies, chat and text completions, answers, the OpenAPI document."""
