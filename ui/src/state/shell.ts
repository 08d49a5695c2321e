/** Commands as they are typed in a shell. */
const USUAL = "127.0.0.1:8420"; // where the command line looks by itself

export function quoted(text: string): string {
  return /^[\w./:@~+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

export interface Offered {
  label: string;
  command: string;
}

/** What can be done with a job of the server at `url`; what needs a version is there once it has published one. */
export function commandsOfJob(job: { job_id: string; adapter_version: string | null; state: string }, url: string): Offered[] {
  const server = new URL(url).host === USUAL ? "" : ` --url ${quoted(url)}`;
  const version = job.adapter_version;
  const isGoing = job.state === "running" || job.state === "queued";
  return [
    ...(version
      ? [
          { label: "Chat", command: `groupwise chat${server} --adapter ${version}` },
          { label: "Activate", command: `groupwise adapters activate ${version}${server}` },
          { label: "Export", command: `groupwise adapters export ${version} ./adapter${server}` },
        ]
      : []),
    isGoing ? { label: "Wait for it", command: `groupwise train wait ${job.job_id}${server}` } : { label: "Status", command: `groupwise train status ${job.job_id}${server}` },
  ];
}

/** What can be done with a run in its directory; what needs a version is there once it has published one. */
export function commandsOf(run: { directory: string; versions: string[]; state: string; step: number; steps: number | null }): Offered[] {
  const at = quoted(run.directory);
  const config = quoted(`${run.directory}/config.yaml`);
  const version = run.versions.at(-1);
  const isLeft = run.state !== "running" && run.steps !== null && run.step < run.steps;
  return [
    ...(version
      ? [
          { label: "Chat", command: `groupwise chat ${at}` },
          { label: "Serve", command: `groupwise serve ${at}` },
          { label: "Export", command: `groupwise adapters export ${at} ./adapter` },
          { label: "Compare with the base", command: `groupwise eval ${config} --adapter ${at} --against base` },
        ]
      : []),
    ...(isLeft ? [{ label: "Continue", command: `groupwise run ${config} run_dir=${at} resume=auto` }] : []),
    { label: "Diagnose", command: `groupwise health ${at}` },
  ];
}
