"""A backend that streams words with pauses: what the launcher is tested with, without a model.

`text_input` says what happens: `unload` makes the backend unload itself from another thread, as
the real one does when its loop dies; `error` answers with an error; `keep` is answered, and the
model is then not unloaded for a minute; `linger` is the same, but nothing is left to do in this
minute, as the launcher is told; anything else streams `max_tokens` words, 0.02 s apart.
"""

import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

from smartspec_py.serving.link import Beat, inherited_link

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PAUSE_S = 0.02


class TritonPythonModel:
    def initialize(self, args):
        pb_utils.Logger.log_info(f"stand-in backend is up as {args['model_name']}")
        self._name = args["model_name"]
        self._is_kept = self._is_lingering = False
        self._is_draining = False
        self._link = inherited_link(self._beat, self._drain)

    def finalize(self):
        if self._is_lingering:
            self._link.end()
            self._link.stopped()
        if self._is_kept or self._is_lingering:
            time.sleep(60.0)
        self._link.end()

    def _beat(self):
        return Beat(os.getpid(), is_draining=self._is_draining)

    def _drain(self):
        self._is_draining = True

    def _unload(self):
        threading.Thread(target=pb_utils.unload_model, args=(self._name,)).start()

    def execute(self, requests):
        for request in requests:
            text = _scalar(request, "text_input").decode()
            num_words = int(_scalar(request, "max_tokens"))
            sender = request.get_response_sender()
            work = threading.Thread(target=self._answer, args=(sender, text, num_words))
            work.start()

    def _answer(self, sender, text, num_words):
        if text == "unload":
            self._unload()
        if text in ("error", "unload"):
            message = f"UNAVAILABLE: told to fail: {text}"  # as the gateway wants it
            error = pb_utils.TritonError(message, pb_utils.TritonError.UNAVAILABLE)
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
            return
        self._is_kept |= text == "keep"
        self._is_lingering |= text == "linger"
        for index in range(num_words):
            is_last = index == num_words - 1
            sender.send(_response(f"word{index} ", is_last, index + 1), FINAL if is_last else 0)
            time.sleep(PAUSE_S)


def _scalar(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0]


def _response(text, is_last, num_steps):
    values = {
        "text_output": np.array([[text.encode()]], dtype=np.object_),
        "finish_reason": np.array([[b"length" if is_last else b""]], dtype=np.object_),
        "num_input_tokens": np.array([[1]], dtype=np.int32),
        "num_output_tokens": np.array([[1]], dtype=np.int32),
        "acceptance_rate": np.array([[0.5]], dtype=np.float32),
        "total_accepted_draft_tokens": np.array([[num_steps]], dtype=np.int32),
        "total_draft_tokens": np.array([[2 * num_steps]], dtype=np.int32),
        "seed": np.array([[7]], dtype=np.uint64),
    }
    return pb_utils.InferenceResponse([pb_utils.Tensor(k, v) for k, v in values.items()])
