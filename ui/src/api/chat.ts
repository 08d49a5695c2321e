/** A conversation, several completions of it, streamed token by token. */
import { ApiError, asJson, request } from "./http";
import { type Content, content, type Given } from "./pictures";
import { events } from "./sse";
import type { ErrorEnvelope, TokenLogprob } from "./types";

export interface Said {
  /** What it wrote in <think> before its answer. */
  thought: string;
  text: string;
  tokens: TokenLogprob[];
  finish: string | null;
}

export interface Message {
  role: string;
  content: Content;
}

export interface Asked {
  model: string;
  messages: Message[];
  n: number;
  temperature: number;
  maxTokens: number;
  seed: number | null;
}

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: unknown;
}

interface Chunk {
  id?: string;
  system_fingerprint?: string;
  error?: ErrorEnvelope["error"];
  choices?: {
    index: number;
    delta: Delta;
    finish_reason: string | null;
    logprobs?: { content?: TokenLogprob[] | null } | null;
  }[];
}

export function messages(asked: { prompt: string; system: string; pictures: Given[] }): Message[] {
  const turn = { role: "user", content: content(asked.prompt, asked.pictures) };
  return asked.system ? [{ role: "system", content: asked.system }, turn] : [turn];
}

/** Fills `said`, one entry a completion, and tells which version answers. Throws ApiError. */
export async function stream(
  asked: Asked,
  said: Said[],
  options: { signal: AbortSignal; version?: (version: string) => void; id?: (id: string) => void },
): Promise<void> {
  const body = {
    messages: asked.messages,
    model: asked.model || null,
    n: asked.n,
    temperature: asked.temperature,
    max_tokens: asked.maxTokens,
    seed: asked.seed,
    stream: true,
    logprobs: true,
    top_logprobs: 4,
  };
  const response = await request("v1/chat/completions", { method: "POST", ...asJson(body), signal: options.signal });
  let whole = false;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") {
      whole = true;
      break;
    }
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error) throw new ApiError(chunk.error.message, 500, chunk.error.code, chunk.error.hint, null);
    if (chunk.id) options.id?.(chunk.id);
    if (chunk.system_fingerprint) options.version?.(chunk.system_fingerprint);
    for (const choice of chunk.choices ?? []) {
      const one = said[choice.index];
      if (!one) continue;
      one.thought += choice.delta.reasoning_content ?? "";
      one.text += choice.delta.content ?? "";
      if (choice.delta.tool_calls) one.text += JSON.stringify(choice.delta.tool_calls);
      one.tokens.push(...(choice.logprobs?.content ?? []));
      one.finish = choice.finish_reason ?? one.finish;
    }
  }
  if (!whole) throw new ApiError("The answer was cut off.", 0, "cut", "Send it again; the server may have restarted.", null);
}
