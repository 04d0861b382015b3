// Streams the answer to one question: chat ADDRESS QUESTION. Ctrl-C cancels the call on the server.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	pb "triptych/inferencev1"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: chat ADDRESS QUESTION")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := chat(ctx, os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintf(os.Stderr, "chat: %s: %s\n", status.Code(err), status.Convert(err).Message())
		os.Exit(1)
	}
}

func chat(ctx context.Context, address, question string) error {
	connection, err := grpc.DialContext(ctx, address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	maxTokens, temperature := uint32(128), float32(0)
	stream, err := pb.NewInferenceServiceClient(connection).Chat(ctx, &pb.ChatRequest{
		Messages: []*pb.ChatMessage{{
			Role:    pb.Role_ROLE_USER,
			Content: []*pb.ContentPart{{Part: &pb.ContentPart_Text{Text: question}}},
		}},
		Options: &pb.Options{MaxTokens: &maxTokens, Sampling: &pb.Sampling{Temperature: &temperature}},
	})
	if err != nil {
		return err
	}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, choice := range message.Choices {
			fmt.Print(choice.Text)
		}
		if usage := message.Usage; usage != nil {
			fmt.Printf("\n[%d + %d tokens]\n", usage.PromptTokens, usage.CompletionTokens)
		}
	}
}
