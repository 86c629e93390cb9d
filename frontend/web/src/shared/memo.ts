import { Component, type ComponentType, createElement } from "preact";

/** Return a component that renders again only when one of its properties has changed. */
export function memo<P extends object>(View: ComponentType<P> | ((props: P) => preact.ComponentChild)): ComponentType<P> {
  return class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      const before = this.props as Record<string, unknown>;
      const after = next as Record<string, unknown>;
      return Object.keys({ ...before, ...after }).some((name) => before[name] !== after[name]);
    }

    override render() {
      return createElement(View as ComponentType<P>, this.props as P);
    }
  };
}
