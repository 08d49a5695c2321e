/** What to do next on a server, in one sentence with where to do it: the first that holds of what is wrong, what goes on,
 * what waits for somebody, and what could be begun. */
import type { LearnAnswer, TrainStatus } from "../../api/types";
import { count, number, short } from "../../state/format";
import { waiting } from "../learn/decisions";

export interface State {
  /** Checks of the server that fail. */
  failing: string[];
  /** The running job, those that wait, those that ended, newest first. */
  jobs: TrainStatus[];
  active: string;
  asked: boolean;
  learn: LearnAnswer | null;
}

export interface Next {
  text: string;
  link: string;
  href: string;
}

export function next({ failing, jobs, active, asked, learn }: State): Next | null {
  if (failing.length) return { text: `The server itself needs attention: ${failing.join(", ").replaceAll("_", " ")}. What to do is said below.`, link: "", href: "" };
  const running = jobs.find((job) => job.state === "running");
  if (running) return { text: `${running.adapter_name} is being trained, step ${running.step} of ${running.steps}.`, link: "Follow it", href: `#/jobs/${running.job_id}` };
  const last = jobs.find((job) => job.state !== "queued");
  if (last?.state === "failed") {
    return { text: `Job ${short(last.job_id)} of ${last.adapter_name} failed${last.error ? `: ${last.error.message}` : "."}`, link: "See why, and what to do", href: `#/jobs/${last.job_id}` };
  }
  if (learn?.trial) return { text: waiting(learn).text, link: "See it, or end it by hand", href: "#/learn" };
  const judged = learn?.transitions.find((each) => ["gate_passed", "gate_refused", "promoted", "rolled_back", "shadow_refused"].includes(each.kind));
  if (judged?.kind === "gate_refused") return { text: refusal(judged.data), link: "See what was compared", href: "#/learn" };
  if (learn?.paused) return { text: "Learning from ratings is paused.", link: "Resume it", href: "#/learn" };
  if (learn?.enabled && learn.after !== null && !learn.job_id) {
    return { text: waiting(learn).text, link: "Rate answers", href: "#/play" };
  }
  if (last?.state === "completed" && last.adapter_version && last.adapter_version !== active) {
    return { text: `${last.adapter_version} was trained, and ${active} answers.`, link: "Compare them, activate one", href: `#/adapters?version=${encodeURIComponent(last.adapter_version)}` };
  }
  if (!jobs.length && active === "base") {
    return asked
      ? { text: "Nothing was trained yet: give prompts, score what the model says, train on it.", link: "Teach the model", href: "#/teach" }
      : { text: "It is served, and nobody has asked it anything yet.", link: "Ask it", href: "#/play" };
  }
  if (learn && !Object.values(learn.counts).some(Boolean)) {
    return { text: `${active} answers, and nobody has rated an answer yet: good, bad, or what it should have said.`, link: "Ask it, and rate", href: "#/play" };
  }
  return { text: `${active} answers.`, link: "Teach it more", href: "#/teach" };
}

/** Why the gate refused the newest version, and what would let such a one pass. */
function refusal(data: Record<string, unknown>): string {
  const [version, prompts, needed, difference] = ["version", "prompts", "prompts_needed", "difference"].map((name) => data[name]);
  const refused = `The gate refused ${String(version)}`;
  if (typeof prompts !== "number") return `${refused}.`;
  if (typeof needed === "number" && needed > prompts) {
    return `${refused}: ${count(prompts, "held-out prompt")} say too little about it. Give it ${needed.toLocaleString("en")} like these, or a wider gate.margin.`;
  }
  if (typeof needed === "number") return `${refused}, for another reason than its reward.`;
  return `${refused}: its reward differs by ${typeof difference === "number" ? number(difference) : "too much"} on ${count(prompts, "held-out prompt")}, and no number of them would let it pass.`;
}
