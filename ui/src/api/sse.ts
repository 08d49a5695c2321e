/** Server-sent events over fetch, which, unlike EventSource, can send the API key. */
export interface ServerEvent {
  event: string;
  id: string;
  data: string;
}

/** How a stream is watched: `heard` is called for whatever comes, signs of life too; it fails after `silentMs` of nothing. */
export interface Watch {
  heard?: () => void;
  silentMs?: number;
}

/** What a followed stream, which says something every 3 s, may keep quiet until its connection counts as dead. */
export const DEAD_MS = 20_000;

export async function* events(response: Response, watch: Watch = {}): AsyncGenerator<ServerEvent> {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await within(reader.read(), watch.silentMs);
      if (done) return;
      watch.heard?.();
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

/** What comes of `work`, or an error after this time. */
async function within<T>(work: Promise<T>, ms?: number): Promise<T> {
  if (ms === undefined) return work;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const silence = new Promise<never>((_, fail) => (timer = setTimeout(() => fail(new Error(`nothing came for ${ms} ms`)), ms)));
  try {
    return await Promise.race([work, silence]);
  } finally {
    clearTimeout(timer);
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
