"""HTTP dialects that harnesses speak to a policy besides OpenAI's chat completions, on live servers and in episodes."""
