/** What people say of answers, and what the server does with it. */
import { get, post } from "./http";
import type { FeedbackAnswer, FeedbackPage, LearnAnswer, LearnHistory } from "./types";

export interface Opinion {
  thumb?: "up" | "down";
  correction?: string;
}

/** Keep an opinion of an answer. Throws ApiError. */
export function rate(id: string, opinion: Opinion): Promise<FeedbackAnswer> {
  return post<FeedbackAnswer>("v1/feedback", { rollout_id: id, ...opinion }, { headers: { "idempotency-key": crypto.randomUUID() } });
}

/** The newest ratings, and what became of them. */
export function listFeedback(limit: number): Promise<FeedbackPage> {
  return get<FeedbackPage>("v1/feedback", { limit });
}

export function learning(): Promise<LearnAnswer> {
  return get<LearnAnswer>("v1/learn");
}

/** What happened before a transition, newest first. */
export function learnedBefore(seq: number): Promise<LearnHistory> {
  return get<LearnHistory>("v1/learn/transitions", { before: seq });
}

/** Make no more jobs by itself, or make them again. */
export function setPaused(paused: boolean): Promise<LearnAnswer> {
  return paused ? post<LearnAnswer>("v1/learn/pause") : post<LearnAnswer>("v1/learn/resume");
}

/** End the trial of a version: it goes live, or it does not. */
export function endTrial(promoted: boolean): Promise<LearnAnswer> {
  return promoted ? post<LearnAnswer>("v1/learn/promote") : post<LearnAnswer>("v1/learn/reject");
}
