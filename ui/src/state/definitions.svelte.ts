/** What each metric means, what is good and what to do otherwise: the table of docs/metrics.md, as the server sends it. */
import { get } from "../api/http";
import type { MetricDefinition, MetricDefinitions } from "../api/types";

class Definitions {
  private rows = $state.raw<MetricDefinition[]>([]);
  private asked = false;

  /** The row of a metric; null where there is none, or none has come yet. */
  of(metric: string): MetricDefinition | null {
    return this.rows.find((row) => row.metric === metric) ?? this.rows.find((row) => fits(row.metric, metric)) ?? null;
  }

  /** Fetch the table, once. */
  ask(): void {
    if (this.asked) return;
    this.asked = true;
    get<MetricDefinitions>("v1/metrics/definitions").then((found) => (this.rows = found.definitions), () => (this.asked = false));
  }
}

/** Whether a metric is meant by a name such as "eval/<mode>/reward". */
export function fits(name: string, metric: string): boolean {
  const parts = name.split(/<\w+>/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${parts.join("[^/]+")}$`).test(metric);
}

export const definitions = new Definitions();
