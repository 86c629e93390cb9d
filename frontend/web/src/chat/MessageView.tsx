import { useState } from "preact/hooks";
import { CopyButton } from "../shared/CopyButton";
import { number, percent, plural, seconds } from "../shared/format";
import { Markdown } from "../shared/markdown";
import { explainRequest } from "../engine/explained";
import { answer, ask, returnResults, tokensPerSecond } from "./answer";
import { change } from "./history";
import { type Conversation, type Cost, type Message, childrenOf, latestLeaf } from "./tree";

interface Props {
  message: Message;
  conversation: Conversation;
  isRunning: boolean;
  isLast: boolean;
  isEdited: boolean;
  onEdit: (id: string) => void;
}

export function MessageView({ message, conversation, isRunning, isLast, isEdited, onEdit }: Props) {
  const { id, role, text } = message;
  const isGrowing = isRunning && isLast && role === "assistant";
  if (isEdited) return <Editor message={message} conversation={conversation} onEnd={() => onEdit("")} />;
  if (role === "tool") return <ToolResult message={message} />;
  return (
    <article class={`message ${role}`} aria-label={role === "user" ? "Question" : "Answer"}>
      {message.images && (
        <div class="images">
          {message.images.map((url, index) => (
            <img key={index} src={url} alt={`Image ${index + 1} of the question`} />
          ))}
        </div>
      )}
      {message.reasoning && (
        <details class="fold" open={isGrowing && !text}>
          <summary>{isGrowing && !text ? "Reasoning …" : "Reasoning"}</summary>
          <Markdown text={message.reasoning} />
        </details>
      )}
      {role === "user" ? <div class="question">{text}</div> : <Markdown text={text} />}
      {isGrowing && <span class="cursor" role="status" aria-label="Answering" />}
      {message.calls?.map((call) => (
        <details key={call.id} class="fold">
          <summary>
            Calls <code>{call.name}</code>
          </summary>
          <pre tabIndex={0}>{pretty(call.arguments)}</pre>
        </details>
      ))}
      {message.calls && isLast && !isRunning && <ResultForm message={message} conversationId={conversation.id} />}
      {message.error && (
        <p class="notice" role="alert">
          {message.error}
        </p>
      )}
      {!isGrowing && (
        <footer>
          <Branches message={message} conversation={conversation} />
          {role === "assistant" && message.cost && <CostLine cost={message.cost} />}
          <span class="tools">
            {role === "assistant" && (
              <button
                class="quiet"
                disabled={isRunning}
                onClick={() => message.parent && void answer(conversation.id, message.parent)}
              >
                Retry
              </button>
            )}
            <button class="quiet" disabled={isRunning} onClick={() => onEdit(id)}>
              Edit
            </button>
            <CopyButton text={text} />
            {message.cost?.requestId && (
              <button class="quiet" onClick={() => explainRequest(message.cost!.requestId!)}>
                Why
              </button>
            )}
          </span>
        </footer>
      )}
    </article>
  );
}

/** Shows which of the alternative messages is displayed, with buttons for the others. */
function Branches({ message, conversation }: { message: Message; conversation: Conversation }) {
  const siblings = childrenOf(conversation, message.parent);
  const index = siblings.findIndex(({ id }) => id === message.id);
  if (siblings.length < 2) return null;
  const show = (target: Message | undefined) =>
    target && change(conversation.id, (before) => ({ ...before, leaf: latestLeaf(before, target.id) }));
  return (
    <span class="branches">
      <button class="plain" aria-label="Earlier branch" disabled={!index} onClick={() => show(siblings[index - 1])}>
        ‹
      </button>
      {index + 1} / {siblings.length}
      <button
        class="plain"
        aria-label="Later branch"
        disabled={index === siblings.length - 1}
        onClick={() => show(siblings[index + 1])}
      >
        ›
      </button>
    </span>
  );
}

function CostLine({ cost }: { cost: Cost }) {
  const speed = tokensPerSecond(cost);
  const parts = [
    cost.outputTokens !== undefined && plural(cost.outputTokens, "token"),
    speed !== undefined && `${number(speed)} a second`,
    cost.firstTokenS !== undefined && `first after ${seconds(cost.firstTokenS)}`,
    cost.promptTokens && cost.cachedTokens !== undefined && `${percent(cost.cachedTokens / cost.promptTokens)} cached`,
    cost.draftTokens ? `${cost.draftTokens} from drafts` : false,
    cost.finish === "stopped" && "stopped",
    cost.finish === "length" && "cut at the token limit",
  ];
  return (
    <span class="cost" title={[cost.model, cost.prefixMatch].filter(Boolean).join("\n")}>
      {parts.filter(Boolean).join(" · ")}
    </span>
  );
}

/** An edited question is asked again; an edited answer is stored on a new branch. */
function Editor({ message, conversation, onEnd }: { message: Message; conversation: Conversation; onEnd: () => void }) {
  const [text, setText] = useState(message.text);
  const isQuestion = message.role === "user";
  const save = () => {
    onEnd();
    if (isQuestion) ask(conversation.id, message.parent, text.trim(), message.images);
    else branchAnswer(conversation.id, message, text);
  };
  const press = (event: KeyboardEvent) => {
    if (event.isComposing) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      onEnd();
    } else if (event.key === "Enter" && !event.shiftKey && isQuestion) {
      event.preventDefault();
      save();
    }
  };
  return (
    <article class="message editor" aria-label="Edit">
      <textarea
        aria-label={isQuestion ? "Edited question" : "Edited answer"}
        rows={3}
        value={text}
        autofocus
        ref={(element) => element?.focus()}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={press}
      />
      <div class="actions">
        <button class="quiet" onClick={onEnd}>
          Cancel
        </button>
        <button class="primary" disabled={!text.trim()} onClick={save}>
          {isQuestion ? "Ask again" : "Save"}
        </button>
      </div>
    </article>
  );
}

function branchAnswer(conversationId: string, message: Message, text: string): void {
  const copy: Message = { ...message, id: `${message.id}-${Date.now()}`, text, time: Date.now() };
  delete copy.cost;
  delete copy.error;
  change(conversationId, (before) => ({
    ...before,
    leaf: copy.id,
    messages: { ...before.messages, [copy.id]: copy },
  }));
}

function ToolResult({ message }: { message: Message }) {
  return (
    <article class="message tool" aria-label="Result of a tool">
      <details class="fold">
        <summary>Result</summary>
        <pre tabIndex={0}>{message.text}</pre>
      </details>
    </article>
  );
}

/** Asks the user for the results of the called tools, because this page runs no tools. */
function ResultForm({ message, conversationId }: { message: Message; conversationId: string }) {
  const [results, setResults] = useState<Record<string, string>>({});
  return (
    <form
      class="results"
      onSubmit={(event) => {
        event.preventDefault();
        returnResults(conversationId, message, results);
      }}
    >
      {message.calls!.map((call) => (
        <label key={call.id} class="field">
          Result of {call.name}
          <textarea
            rows={2}
            class="code"
            value={results[call.id] ?? ""}
            onInput={(event) => setResults({ ...results, [call.id]: event.currentTarget.value })}
          />
        </label>
      ))}
      <div class="actions">
        <button class="primary" type="submit">
          Return
        </button>
      </div>
    </form>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
