// The served models and what they can do.
import { getJson, postJson } from "../shared/api";
import { Store } from "../shared/store";

export interface Model {
  id: string;
  maxLength: number;
  /** Some of "completion", "tools", "thinking", "vision" and "embedding". */
  capabilities: string[];
}

export const models = new Store<Model[]>([]);

export async function loadModels(): Promise<void> {
  const { data } = await getJson<{ data: { id: string; max_model_len: number }[] }>("v1/models");
  const found = data.map(async ({ id, max_model_len }) => {
    const { capabilities } = await postJson<{ capabilities: string[] }>("api/show", { model: id });
    return { id, maxLength: max_model_len, capabilities };
  });
  models.set(await Promise.all(found));
}

/** Return the model of this name, or the first model if the name is not served. */
export function findModel(all: Model[], name: string): Model | undefined {
  return all.find((model) => model.id === name) ?? all[0];
}
