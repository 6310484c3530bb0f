/** Calls of the server, with the key of its user. The key stays in this tab, and goes with it. */

const KEY = "tilework-key";

export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly details: Record<string, unknown> = {},
  ) {
    super(message);
  }
}

let asking: ((isWrong: boolean) => void) | undefined;

/** Let this ask the user for a key, when the server wants one. `setKey` answers. */
export function onKeyWanted(ask: (isWrong: boolean) => void): void {
  asking = ask;
}

export const hasKey = (): boolean => sessionStorage.getItem(KEY) !== null;

export function setKey(key: string): void {
  sessionStorage.setItem(KEY, key);
  keySet.forEach((call) => call());
}

/** Called when the user has given a key. */
export const keySet = new Set<() => void>();

export async function call(path: string, options: RequestInit = {}): Promise<Response> {
  const key = sessionStorage.getItem(KEY);
  const headers = new Headers(options.headers);
  if (key !== null) headers.set("Authorization", `Bearer ${key}`);
  const answer = await fetch(path, { ...options, headers, credentials: "omit" });
  if (answer.ok) return answer;
  const error = await answer.json().then(
    (body) => body.error as { message: string } & Record<string, unknown>,
    () => ({ message: `The server answered ${answer.status}.` }),
  );
  if (answer.status === 401) asking?.(key !== null);
  throw new Refused(answer.status, error.message, error);
}

export const get = async <T>(path: string): Promise<T> => (await call(path)).json() as Promise<T>;

export const post = (path: string, body: unknown, signal?: AbortSignal): Promise<Response> =>
  call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    ...(signal ? { signal } : {}),
  });

/** The data of server-sent events as they come. `EventSource` cannot send a key. */
export async function* events<T>(answer: Response): AsyncGenerator<T> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      let begin = 0;
      let end = Math.max(0, rest.length - 1);
      rest += value;
      while ((end = rest.indexOf("\n\n", end)) >= 0) {
        const data = rest
          .slice(begin, end)
          .split("\n")
          .find((line) => line.startsWith("data: "));
        begin = end += 2;
        if (data !== undefined) yield JSON.parse(data.slice(6)) as T;
      }
      rest = rest.slice(begin);
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
