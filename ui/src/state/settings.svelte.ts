/** What this browser remembers: the theme, and, until its tab is closed or for good, the API key. */
type Theme = "auto" | "light" | "dark";

const THEME = "groupwise.theme";
const KEY = "groupwise.key";

/** What is remembered under a name; null where the browser remembers nothing, as for some files on disk. */
function remembered(name: string): string | null {
  try {
    return sessionStorage.getItem(name) ?? localStorage.getItem(name);
  } catch {
    return null;
  }
}

function remember(name: string, value: string): void {
  try {
    localStorage.setItem(name, value);
  } catch {
    return; // until the page is closed
  }
}

class Settings {
  theme = $state<Theme>((remembered(THEME) as Theme | null) ?? "auto");
  key = $state(remembered(KEY) ?? "");
  /** The server asked for a key, or for another one. */
  locked = $state(false);

  apply(): void {
    if (this.theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.theme;
  }

  setTheme(theme: Theme): void {
    this.theme = theme;
    remember(THEME, theme);
    this.apply();
  }

  setKey(key: string, keep: boolean): void {
    this.forgetKey();
    (keep ? localStorage : sessionStorage).setItem(KEY, key);
    this.key = key;
    this.locked = false;
  }

  forgetKey(): void {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
    this.key = "";
  }
}

export const settings = new Settings();
