/** Which versions a search finds, and the list by names: of each name the newest few, until all are asked for. */
import type { AdapterVersion } from "../../api/types";
import { number } from "../../state/format";
import { headline, nameOf } from "./lineage";

const NEWEST = 5;
const COMPARISON = /^([\w/.-]+?)(>=|<=|>|<|=)(-?[\d.]+(?:e-?\d+)?)$/i;

type Test = (value: number, bound: number) => boolean;
const TESTS: Record<string, Test> = {
  ">": (value, bound) => value > bound,
  "<": (value, bound) => value < bound,
  ">=": (value, bound) => value >= bound,
  "<=": (value, bound) => value <= bound,
  "=": (value, bound) => value === bound,
};

/** The versions that every word of `typed` fits: a part of name, parent, job, note, base model or headline, or a comparison
 * of a metric, "reward>0.8" or "kl/mean<=0.05". */
export function found(versions: AdapterVersion[], typed: string): AdapterVersion[] {
  const tests = typed.toLowerCase().split(/\s+/).filter(Boolean).map(fits);
  return tests.length ? versions.filter((each) => tests.every((test) => test(each))) : versions;
}

function fits(word: string): (version: AdapterVersion) => boolean {
  const [, metric = "", sign = "", bound = ""] = COMPARISON.exec(word) ?? [];
  const test = TESTS[sign];
  if (test) {
    return ({ metrics, held_out }) => {
      const value = metric === "held_out" ? held_out : (metrics[metric] ?? metrics[`${metric}/mean`]);
      return typeof value === "number" && test(value, Number(bound));
    };
  }
  return (version) => words(version).includes(word);
}

function words(version: AdapterVersion): string {
  const said = headline(version);
  const parts = [version.version, version.parent, version.job_id, version.note, version.base_model, said && `${said.name} ${number(said.value)}`];
  return parts.filter(Boolean).join(" ").toLowerCase();
}

export type Shelved =
  | { kind: "name"; id: string; name: string; count: number; newest: AdapterVersion; open: boolean }
  | { kind: "version"; id: string; version: AdapterVersion }
  | { kind: "more"; id: string; name: string; count: number };

/** Rows: the name that was added to last comes first, under it its newest versions. `open` and `whole` are names. */
export function shelved(versions: AdapterVersion[], open: (name: string) => boolean, whole: (name: string) => boolean): Shelved[] {
  const groups = new Map<string, AdapterVersion[]>();
  for (const each of versions) {
    const name = nameOf(each.version);
    groups.set(name, [...(groups.get(name) ?? []), each]);
  }
  const when = ([, group]: [string, AdapterVersion[]]): string => group.at(-1)?.created_at ?? "";
  return [...groups].sort((a, b) => when(b).localeCompare(when(a))).flatMap(([name, group]) => {
    const newest = group.at(-1);
    if (!newest) return [];
    const head: Shelved = { kind: "name", id: `name ${name}`, name, count: group.length, newest, open: open(name) };
    if (!head.open) return [head];
    const listed = group.toReversed().slice(0, whole(name) || group.length <= NEWEST + 1 ? undefined : NEWEST);
    const rows = listed.map((version): Shelved => ({ kind: "version", id: version.version, version }));
    const more: Shelved = { kind: "more", id: `more ${name}`, name, count: group.length };
    return [head, ...rows, ...(listed.length < group.length ? [more] : [])];
  });
}
