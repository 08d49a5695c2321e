/** Requests to the server that this page came from; errors as the server words them. */
import { settings } from "../state/settings.svelte";
import { parsed, written } from "./json";
import { answered, saved } from "./saved";
import type { ErrorEnvelope } from "./types";

const ROOT = new URL("../", document.baseURI); // the page is at <root>/ui/

type Query = Record<string, string | number | boolean | null | undefined>;

/** What the server, or the network, refused: what happened and what to do. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string,
    readonly hint: string | null,
    readonly requestId: string | null,
  ) {
    super(message);
  }
}

export function apiUrl(path: string, query: Query = {}): URL {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, String(value));
  }
  return url;
}

/** A response that is a success. Throws ApiError. */
export async function request(path: string, init: RequestInit & { query?: Query } = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (settings.key) headers.set("authorization", `Bearer ${settings.key}`);
  const url = apiUrl(path, init.query);
  let response: Response;
  try {
    response = saved ? answered(saved, path, url.searchParams) : await fetch(url, { ...init, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError("The server does not answer.", 0, "unreachable", "Is it still running?", null);
  }
  if (response.ok) return response;
  throw await problem(response);
}

async function problem(response: Response): Promise<ApiError> {
  const id = response.headers.get("x-request-id");
  if (response.status === 401) settings.locked = true;
  try {
    const { error } = (await response.json()) as ErrorEnvelope;
    return new ApiError(error.message, response.status, error.code, error.hint, id);
  } catch {
    return new ApiError(`The server answered ${response.status}.`, response.status, "unexpected", null, id);
  }
}

export async function get<T>(path: string, query?: Query, signal?: AbortSignal): Promise<T> {
  return (await request(path, { query, signal })).json() as Promise<T>;
}

/** `get` of what has the token ids of a prompt, which may be of images: numbers that a double does not hold are BigInt. */
export async function getExactly<T>(path: string): Promise<T> {
  return parsed<T>(await (await request(path)).text());
}

export async function post<T>(path: string, body?: unknown, init: RequestInit = {}): Promise<T> {
  return (await request(path, { ...init, ...asJson(body), method: "POST" })).json() as Promise<T>;
}

export async function put<T>(path: string, body: unknown): Promise<T> {
  return (await request(path, { ...asJson(body), method: "PUT" })).json() as Promise<T>;
}

export async function remove<T>(path: string): Promise<T> {
  return (await request(path, { method: "DELETE" })).json() as Promise<T>;
}

export function asJson(body: unknown): RequestInit {
  return body === undefined ? {} : { body: written(body), headers: { "content-type": "application/json" } };
}

/** Save what a route sends, or a text made here, as a file. */
export async function download(name: string, content: string | { path: string }): Promise<void> {
  const blob = typeof content === "string" ? new Blob([content]) : await (await request(content.path)).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const segment = encodeURIComponent;
