/** How curves are drawn, on every page alike; this browser remembers it. */
const SMOOTHING = "groupwise.smoothing";

function remembered(): number {
  try {
    const value = Number(localStorage.getItem(SMOOTHING));
    return value > 0 && value < 1 ? value : 0;
  } catch {
    return 0; // some files on disk remember nothing
  }
}

class Charts {
  /** The share of what came before in a smoothed curve; 0 draws what was measured. */
  smoothing = $state(remembered());

  smooth(weight: number): void {
    this.smoothing = weight;
    try {
      localStorage.setItem(SMOOTHING, String(weight));
    } catch {
      return; // until the page is closed
    }
  }
}

export const charts = new Charts();
