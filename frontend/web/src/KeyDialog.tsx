import { useRef } from "preact/hooks";
import { apiKey, declineKey, setApiKey } from "./shared/api";
import { Dialog } from "./shared/Dialog";

/** Asks for the API key. Without a key, only the parts of the page that the server allows work. */
export function KeyDialog({ onClose }: { onClose: () => void }) {
  const key = useRef<HTMLInputElement>(null);
  const remember = useRef<HTMLInputElement>(null);
  const close = () => {
    declineKey();
    onClose();
  };
  const save = (event: Event) => {
    event.preventDefault();
    setApiKey(key.current!.value.trim(), remember.current!.checked);
    onClose();
  };
  return (
    <Dialog title="API key" onClose={close}>
      <form onSubmit={save} class="stack">
        <p class="muted">
          The server asks for the key of <code>--api-key</code>. The Engine page shows more with the key of{" "}
          <code>--admin-api-key</code>.
        </p>
        <label class="field">
          Key
          <input ref={key} type="password" autocomplete="off" spellcheck={false} defaultValue={apiKey.get()} autofocus />
        </label>
        <label class="check">
          <input ref={remember} type="checkbox" /> Remember it in this browser
        </label>
        <div class="actions">
          <button class="primary" type="submit">
            Use this key
          </button>
        </div>
      </form>
    </Dialog>
  );
}
