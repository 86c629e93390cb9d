// Markdown as elements. A model's text never becomes HTML: the library marked finds the structure, and each kind of part
// that is listed here becomes an element; the rest stays text. Images of other hosts become links, so that showing an
// answer sends nothing to other hosts.
import { type Token, type Tokens, lexer } from "marked";
import { type ComponentChildren, Fragment } from "preact";
import { memo } from "./memo";
import { CopyButton } from "./CopyButton";

export const Markdown = memo(function Markdown({ text }: { text: string }) {
  return <div class="markdown">{blocks(lexer(text, { gfm: true }))}</div>;
});

const SAFE_LINK = /^(https?:|mailto:)/i;

function blocks(tokens: Token[]): ComponentChildren {
  return tokens.map((token, index) => <Fragment key={index}>{block(token)}</Fragment>);
}

function block(token: Token): ComponentChildren {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      // The page itself has headings of higher levels.
      const Tag = `h${Math.min(token.depth + 2, 6)}` as "h3";
      return <Tag>{inline(token.tokens)}</Tag>;
    }
    case "paragraph":
      return <p>{inline(token.tokens)}</p>;
    case "blockquote":
      return <blockquote>{blocks(token.tokens ?? [])}</blockquote>;
    case "hr":
      return <hr />;
    case "code":
      return (
        <div class="code">
          <div class="code-head">
            <span>{token.lang}</span>
            <CopyButton text={token.text} />
          </div>
          <pre tabIndex={0}>
            <code>{token.text}</code>
          </pre>
        </div>
      );
    case "list": {
      const list = token as Tokens.List;
      const items = list.items.map((item, index) => (
        <li key={index}>
          {item.task && <input type="checkbox" checked={item.checked ?? false} disabled aria-label="Done" />}
          {blocks(item.tokens)}
        </li>
      ));
      return list.ordered ? <ol start={Number(list.start) || 1}>{items}</ol> : <ul>{items}</ul>;
    }
    case "table":
      return table(token as Tokens.Table);
    case "text":
      return "tokens" in token && token.tokens ? inline(token.tokens) : token.text;
    default:
      return <p>{token.raw}</p>;
  }
}

function table({ header, rows, align }: Tokens.Table): ComponentChildren {
  const style = (column: number) => ({ textAlign: align[column] ?? "left" });
  return (
    <div class="table" tabIndex={0}>
      <table>
        <thead>
          <tr>
            {header.map((cell, column) => (
              <th key={column} style={style(column)}>
                {inline(cell.tokens)}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, index) => (
            <tr key={index}>
              {row.map((cell, column) => (
                <td key={column} style={style(column)}>
                  {inline(cell.tokens)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function inline(tokens: Token[] | undefined): ComponentChildren {
  return tokens?.map((token, index) => <Fragment key={index}>{span(token)}</Fragment>);
}

function span(token: Token): ComponentChildren {
  switch (token.type) {
    case "strong":
      return <strong>{inline(token.tokens)}</strong>;
    case "em":
      return <em>{inline(token.tokens)}</em>;
    case "del":
      return <del>{inline(token.tokens)}</del>;
    case "codespan":
      return <code>{token.text}</code>;
    case "br":
      return <br />;
    case "link":
    case "image":
      return SAFE_LINK.test(token.href) ? (
        <a href={token.href} target="_blank" rel="noopener noreferrer">
          {token.type === "link" ? inline(token.tokens) : `Image: ${token.text || token.href}`}
        </a>
      ) : (
        token.raw
      );
    case "escape":
      return token.text;
    case "text":
      return "tokens" in token && token.tokens ? inline(token.tokens) : unescape(token.text);
    default:
      return token.raw;
  }
}

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };

/** Replace the HTML entities that models write. */
function unescape(text: string): string {
  return text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name: string) => ENTITIES[name]!);
}
