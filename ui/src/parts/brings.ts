/** Where pictures may be pasted and dropped. What else is pasted goes where it always went. */
export function brings(node: HTMLElement, add: (files: File[]) => void): { destroy: () => void } {
  const paste = (event: ClipboardEvent): void => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length || event.clipboardData?.types.includes("text/plain")) return; // a cell of a table comes as text and as a picture of it
    event.preventDefault();
    event.stopPropagation();
    add(files);
  };
  const over = (event: DragEvent): void => {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); // else the browser opens the file
  };
  const drop = (event: DragEvent): void => {
    const files = [...(event.dataTransfer?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    event.stopPropagation();
    add(files);
  };
  node.addEventListener("paste", paste);
  node.addEventListener("dragover", over);
  node.addEventListener("drop", drop);
  return {
    destroy: () => {
      node.removeEventListener("paste", paste);
      node.removeEventListener("dragover", over);
      node.removeEventListener("drop", drop);
    },
  };
}
