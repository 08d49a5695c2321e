/** Asks one thing at a time, the newest, and rests after an answer as long as that took: of a page that is told of every
 *  step of a fast job, questions would else hold all of a browser's connections to the server, and clicks wait behind. */
const REST_MS = 1000;

export function unhurried(rest = REST_MS): (ask: () => Promise<unknown>) => void {
  let wanted: (() => Promise<unknown>) | null = null;
  let busy = false;

  async function go(): Promise<void> {
    busy = true;
    while (wanted) {
      const ask = wanted;
      const began = performance.now();
      wanted = null;
      await ask().catch(() => undefined);
      await new Promise((resolve) => setTimeout(resolve, Math.max(rest, performance.now() - began)));
    }
    busy = false;
  }

  return (ask) => {
    wanted = ask;
    if (!busy) void go();
  };
}
