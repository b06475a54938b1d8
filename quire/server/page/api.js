// The server's public API, as anybody would call it; where it asks for a key, so does this page.

import { askForKey, storedKey } from "./key.js";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function failure(response) {
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch { /* it was no JSON */ }
  return new ApiError(response.status, message);
}

export async function call(path, { body, signal } = {}) {
  for (let refused = false; ; refused = true) {
    const key = storedKey();
    const headers = {};
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "omit",
      cache: "no-store",
    });
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    // Another call may have got the right key while this one was on its way.
    if (storedKey() !== key) continue;
    if (!(await askForKey(refused || Boolean(key)))) throw await failure(response);
  }
}
