/** Commands as they are typed in a shell. */
export function quoted(text: string): string {
  return /^[\w./:@~+=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

export interface Offered {
  label: string;
  command: string;
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

/** What can be done with a job of the server at `root`; what needs a version is there once it has made one. */
export function commandsOfJob(job: { job_id: string; state: string; adapter_version: string | null }, root: string): Offered[] {
  const at = ` --url ${quoted(root.replace(/\/$/, ""))}`;
  const goes = job.state === "queued" || job.state === "running";
  return [
    ...(goes
      ? [
          { label: "Follow", command: `groupwise train wait ${job.job_id} --follow${at}` },
          { label: "Cancel", command: `groupwise train cancel ${job.job_id}${at}` },
        ]
      : [{ label: "Show", command: `groupwise train status ${job.job_id}${at}` }]),
    ...(job.adapter_version
      ? [
          { label: "Chat", command: `groupwise chat --adapter ${quoted(job.adapter_version)}${at}` },
          { label: "Activate", command: `groupwise adapters activate ${quoted(job.adapter_version)}${at}` },
          { label: "Download", command: `groupwise adapters download ${quoted(job.adapter_version)}${at}` },
        ]
      : []),
  ];
}
