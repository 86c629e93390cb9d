import { useEffect, useRef, useState } from "preact/hooks";
import { useStore } from "../shared/store";
import { running, stop } from "./answer";

/** Whether the browser can fit the height of a field to its text (CSS field-sizing). */
const GROWS = CSS.supports("field-sizing", "content");
const MAX_IMAGE_BYTES = 20 * 1024 * 1024;

interface Props {
  conversationId: string;
  takesImages: boolean;
  onSend: (text: string, images: string[]) => void;
  onEditLast: () => void;
}

/** The input field for the next message. */
export function Composer({ conversationId, takesImages, onSend, onEditLast }: Props) {
  const [text, setText] = useState("");
  const [images, setImages] = useState<string[]>([]);
  const [problem, setProblem] = useState("");
  const isRunning = conversationId in useStore(running);
  const field = useRef<HTMLTextAreaElement>(null);
  const files = useRef<HTMLInputElement>(null);

  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) field.current!.focus();
  }, []);

  const send = () => {
    if (isRunning || (!text.trim() && !images.length)) return;
    onSend(text.trim(), images);
    setText("");
    setImages([]);
  };
  const press = (event: KeyboardEvent) => {
    // Ignore the key that ends a composition (input method editor), such as of Chinese characters.
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      send();
    } else if (event.key === "ArrowUp" && !text) {
      event.preventDefault();
      onEditLast();
    }
  };
  const addFiles = async (list: Iterable<File>) => {
    setProblem("");
    for (const file of list) {
      if (!file.type.startsWith("image/")) continue;
      if (!takesImages) setProblem("This model takes no images.");
      else if (file.size > MAX_IMAGE_BYTES) setProblem(`${file.name} is larger than 20 MiB.`);
      else {
        const url = await readAsUrl(file);
        setImages((before) => [...before, url]);
      }
    }
  };

  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => {
        event.preventDefault();
        void addFiles(event.dataTransfer?.files ?? []);
      }}
    >
      {problem && (
        <p class="notice" role="alert">
          {problem}
        </p>
      )}
      {images.length > 0 && (
        <ul class="images">
          {images.map((url, index) => (
            <li key={index}>
              <img src={url} alt={`Image ${index + 1}`} />
              <button
                class="plain"
                type="button"
                aria-label={`Remove image ${index + 1}`}
                onClick={() => setImages(images.filter((_, other) => other !== index))}
              >
                ✕
              </button>
            </li>
          ))}
        </ul>
      )}
      <div class="line">
        <textarea
          ref={field}
          rows={GROWS ? 1 : Math.min(12, text.split("\n").length)}
          value={text}
          placeholder="Write a message"
          aria-label="Message"
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={press}
          onPaste={(event) => void addFiles(event.clipboardData?.files ?? [])}
        />
        {takesImages && (
          <>
            <input
              ref={files}
              type="file"
              accept="image/*"
              multiple
              hidden
              onChange={(event) => {
                void addFiles(event.currentTarget.files ?? []);
                event.currentTarget.value = "";
              }}
            />
            <button class="quiet" type="button" onClick={() => files.current!.click()}>
              Image
            </button>
          </>
        )}
        {isRunning ? (
          <button class="primary" type="button" onClick={() => stop(conversationId)}>
            Stop
          </button>
        ) : (
          <button class="primary" type="submit" disabled={!text.trim() && !images.length}>
            Send
          </button>
        )}
      </div>
    </form>
  );
}

function readAsUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
