import { useEffect, useReducer } from "preact/hooks";
import type { Live } from "./live";

/** Draw the component again with each frame of the server. */
export function useFrames(live: Live): void {
  const [, again] = useReducer((count: number) => count + 1, 0);
  useEffect(() => live.subscribe(() => again(undefined as never)), [live]);
}
