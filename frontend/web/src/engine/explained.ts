import { Store } from "../shared/store";

/** The request that a dialog explains; "" for none. */
export const explainedId = new Store("");

export function explainRequest(id: string): void {
  explainedId.set(id);
}
