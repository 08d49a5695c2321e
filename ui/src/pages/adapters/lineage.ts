/** Versions by which came from which, as rows of a drawing: a chain stays in its lane, each branch gets one more. */
import type { AdapterVersion } from "../../api/types";

export interface Row {
  id: string;
  /** null: the base model, or a version that was deleted. */
  version: AdapterVersion | null;
  lane: number;
  /** The lane that it comes from; null for a root. */
  from: number | null;
  /** Whether its chain goes on below, in its lane. */
  goesOn: boolean;
  /** Other lanes whose lines pass this row. */
  passing: number[];
}

const BASE = "base";

export function lineage(versions: AdapterVersion[]): Row[] {
  const known = new Map(versions.map((each) => [each.version, each]));
  const children = new Map<string, AdapterVersion[]>();
  for (const each of versions) children.set(each.parent, [...(children.get(each.parent) ?? []), each]);
  const gone = [...children.keys()].filter((id) => id !== BASE && !known.has(id)).sort();
  const rows: Row[] = [];

  function visit(id: string, lane: number, from: number | null, passing: number[]): void {
    const below = (children.get(id) ?? []).toSorted((a, b) => a.created_at.localeCompare(b.created_at));
    const main = below.find((each) => nameOf(each.version) === nameOf(id)) ?? below.at(-1);
    rows.push({ id, version: known.get(id) ?? null, lane, from, goesOn: main !== undefined, passing });
    for (const branch of below) {
      if (branch !== main) visit(branch.version, lane + 1, lane, [...passing, lane]);
    }
    if (main) visit(main.version, lane, lane, passing);
  }

  for (const root of [BASE, ...gone]) visit(root, 0, null, []);
  return rows;
}

export function nameOf(version: string): string {
  return version.split("@")[0] ?? version;
}

/** What a version is judged by at a glance: its own held-out reward where it has one. The reward of the job that made it is of
 * what its predecessor sampled, and is called so. */
export function headline(version: AdapterVersion): { name: string; value: number } | null {
  if (version.held_out !== null) return { name: "held out", value: version.held_out };
  for (const [metric, name] of [["reward/mean", `${version.parent} was posted`], ["loss/cross_entropy", "cross-entropy"]] as const) {
    const value = version.metrics[metric];
    if (typeof value === "number") return { name, value };
  }
  return null;
}
