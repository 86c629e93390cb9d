import { Dialog } from "./shared/Dialog";

const KEYS: [string, string][] = [
  ["Enter", "Send"],
  ["Shift Enter", "New line"],
  ["Escape", "Stop the answer"],
  ["↑", "Edit the last question, in an empty field"],
  ["/", "Write a message"],
  ["n", "New conversation"],
  ["c", "Chat"],
  ["e", "Engine"],
  ["?", "This list"],
];

export function Shortcuts({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard" onClose={onClose}>
      <dl class="keys">
        {KEYS.map(([key, action]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{action}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}
