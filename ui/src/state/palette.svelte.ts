/** Whether the list of commands, or the list of keys, is open. */
class PaletteState {
  shown = $state<"" | "commands" | "keys">("");

  open(): void {
    this.shown = "commands";
  }
}

export const palette = new PaletteState();
