/** Server-sent events over fetch, which, unlike EventSource, can send the API key. */
export interface ServerEvent {
  event: string;
  id: string;
  data: string;
}

export async function* events(response: Response): AsyncGenerator<ServerEvent> {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
        const event = parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (event) yield event;
      }
    }
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}

function parse(block: string): ServerEvent | null {
  const fields = { event: "message", id: "", data: "" };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") fields.data += fields.data ? `\n${value}` : value;
    else if (name === "event" || name === "id") fields[name] = value;
  }
  return fields.data ? fields : null;
}
