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
