// Streams the answer to one question: chat ADDRESS QUESTION. Ctrl-C cancels the call on the server.
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import triptych.inference.v1.Generation.Sampling;
import triptych.inference.v1.Inference.ChatMessage;
import triptych.inference.v1.Inference.ChatRequest;
import triptych.inference.v1.Inference.ChatResponse;
import triptych.inference.v1.Inference.Choice;
import triptych.inference.v1.Inference.ContentPart;
import triptych.inference.v1.Inference.Options;
import triptych.inference.v1.Inference.Role;
import triptych.inference.v1.InferenceServiceGrpc;

public final class Chat {
    public static void main(String[] arguments) {
        if (arguments.length != 2) {
            System.err.println("usage: chat ADDRESS QUESTION");
            System.exit(2);
        }
        ManagedChannel channel = Grpc.newChannelBuilder(arguments[0], InsecureChannelCredentials.create()).build();
        Runtime.getRuntime().addShutdownHook(new Thread(channel::shutdownNow)); // cancels what runs
        try {
            chat(channel, arguments[1]);
        } catch (StatusRuntimeException error) {
            System.err.printf("chat: %s: %s%n", error.getStatus().getCode(), error.getStatus().getDescription());
            System.exit(1);
        } finally {
            channel.shutdownNow();
        }
    }

    private static void chat(ManagedChannel channel, String question) {
        ChatRequest request = ChatRequest.newBuilder()
                .addMessages(ChatMessage.newBuilder()
                        .setRole(Role.ROLE_USER)
                        .addContent(ContentPart.newBuilder().setText(question)))
                .setOptions(Options.newBuilder()
                        .setMaxTokens(128)
                        .setSampling(Sampling.newBuilder().setTemperature(0)))
                .build();
        Iterator<ChatResponse> messages = InferenceServiceGrpc.newBlockingStub(channel).chat(request);
        while (messages.hasNext()) {
            ChatResponse message = messages.next();
            for (Choice choice : message.getChoicesList()) {
                System.out.print(choice.getText());
                System.out.flush();
            }
            if (message.hasUsage()) {
                System.out.printf("%n[%d + %d tokens]%n",
                        message.getUsage().getPromptTokens(), message.getUsage().getCompletionTokens());
            }
        }
    }
}
