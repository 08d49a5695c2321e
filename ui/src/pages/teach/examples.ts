/** Lessons to begin with. The starter model gets each of them right sometimes, so that there is something to learn. */
import type { Check } from "./scoring";

export interface ExampleTask {
  name: string;
  says: string;
  check: Check;
  pattern?: string;
  by: "answer" | "thumbs" | "pairs";
  prompts: { text: string; answer: string }[];
}

const SUMS = [
  [47, 38], [123, 58], [64, 29], [85, 167], [138, 47], [159, 76], [116, 95], [72, 88],
  [35, 148], [157, 66], [93, 79], [144, 58], [68, 127], [119, 83], [56, 186], [175, 49],
] as const;
const LISTS = ["69, 94, 17", "8, 3, 5, 1", "40, 12, 77", "93, 27, 51, 6", "15, 88, 2", "34, 31, 39", "71, 20, 65", "9, 90, 45"];
const PEOPLE = [["Chen", 16], ["Ada", 36], ["Noah", 8], ["Vera", 61], ["Ravi", 27], ["Lily", 44], ["Omar", 19], ["Sofia", 52]] as const;

const sorted = (list: string): string => list.split(", ").map(Number).toSorted((a, b) => a - b).join(", ");

export const EXAMPLES: ExampleTask[] = [
  {
    name: "Sums", says: "Work it out instead of guessing. Scored by the last number.", check: "number", by: "answer",
    prompts: SUMS.map(([a, b]) => ({ text: `What is ${a} + ${b}? Think step by step.`, answer: String(a + b) })),
  },
  {
    name: "Just the list", says: "Sort numbers, and write nothing else. Scored by the whole text.", check: "exact", by: "answer",
    prompts: LISTS.map((list) => ({ text: `Sort: ${list}. Just the list.`, answer: sorted(list) })),
  },
  {
    name: "Your taste", says: "Nothing is right or wrong: choose the better of two.", check: "contains", by: "pairs",
    prompts: PEOPLE.map(([name, age]) => ({ text: `${name} is ${age} years old. Give JSON with name and age.`, answer: "" })),
  },
];
