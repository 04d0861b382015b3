// Streams the answer to one question: chat ADDRESS QUESTION. Ctrl-C cancels the call on the server.
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include "triptych/inference/v1/inference.grpc.pb.h"

namespace v1 = triptych::inference::v1;

namespace {

const char* name_of(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::CANCELLED: return "CANCELLED";
    case grpc::StatusCode::INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case grpc::StatusCode::DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::NOT_FOUND: return "NOT_FOUND";
    case grpc::StatusCode::RESOURCE_EXHAUSTED: return "RESOURCE_EXHAUSTED";
    case grpc::StatusCode::FAILED_PRECONDITION: return "FAILED_PRECONDITION";
    case grpc::StatusCode::UNIMPLEMENTED: return "UNIMPLEMENTED";
    case grpc::StatusCode::INTERNAL: return "INTERNAL";
    case grpc::StatusCode::UNAVAILABLE: return "UNAVAILABLE";
    default: return "UNKNOWN";
  }
}

grpc::Status chat(v1::InferenceService::Stub& stub, grpc::ClientContext& context, const std::string& question) {
  v1::ChatRequest request;
  v1::ChatMessage* message = request.add_messages();
  message->set_role(v1::ROLE_USER);
  message->add_content()->set_text(question);
  request.mutable_options()->set_max_tokens(128);
  request.mutable_options()->mutable_sampling()->set_temperature(0);

  std::unique_ptr<grpc::ClientReader<v1::ChatResponse>> reader = stub.Chat(&context, request);
  v1::ChatResponse response;
  while (reader->Read(&response)) {
    for (const v1::Choice& choice : response.choices()) std::cout << choice.text() << std::flush;
    if (response.has_usage()) {
      const v1::Usage& usage = response.usage();
      std::cout << "\n[" << usage.prompt_tokens() << " + " << usage.completion_tokens() << " tokens]\n";
    }
  }
  return reader->Finish();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: chat ADDRESS QUESTION\n";
    return 2;
  }
  sigset_t interrupt;  // waited for by a thread of its own: a handler may not call gRPC
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, nullptr);

  auto stub = v1::InferenceService::NewStub(grpc::CreateChannel(arguments[1], grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  std::thread([&] {
    int number;
    sigwait(&interrupt, &number);
    context.TryCancel();
  }).detach();

  const grpc::Status status = chat(*stub, context, arguments[2]);
  if (!status.ok()) {
    std::cerr << "chat: " << name_of(status.error_code()) << ": " << status.error_message() << "\n";
  }
  std::cout << std::flush;
  _exit(status.ok() ? 0 : 1);  // the thread still waits
}
