// A value that views can subscribe to.
import { useEffect, useState } from "preact/hooks";

export class Store<T> {
  private readonly watchers = new Set<() => void>();

  constructor(private value: T) {}

  get(): T {
    return this.value;
  }

  set(value: T): void {
    this.value = value;
    for (const watcher of [...this.watchers]) watcher();
  }

  update(change: (value: T) => T): void {
    this.set(change(this.value));
  }

  /** Call `watcher` after each change, until the returned function is called. */
  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }
}

/** Return the value of a store, and render again when it changes. */
export function useStore<T>(store: Store<T>): T {
  const [, render] = useState({});
  useEffect(() => store.watch(() => render({})), [store]);
  return store.get();
}
