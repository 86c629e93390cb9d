import { useState } from "preact/hooks";

/** A button that copies a text to the clipboard. */
export function CopyButton({ text, label = "Copy" }: { text: string; label?: string }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    await writeClipboard(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <button class="quiet" onClick={() => void copy()}>
      {isCopied ? "Copied" : label}
    </button>
  );
}

async function writeClipboard(text: string): Promise<void> {
  // Browsers offer the clipboard only to pages from https URLs and from this machine.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
